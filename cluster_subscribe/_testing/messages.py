"""Callers, messages, cards and labels: what a scene says and hears, in a line each."""

import uuid

from typing import Final

from a2a.auth.user import User
from a2a.server.agent_execution import RequestContext
from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    Artifact,
    Message,
    Part,
    Role,
    SendMessageRequest,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)

CHUNKS: Final = 'chunks'
"""The id of the artifact that `chunk` words write."""


def label(event: Event) -> str:
    """An event in a word or two: `Task(WORKING)`, `COMPLETED`, `art x`, `chunk 3`."""
    if isinstance(event, Message):
        return 'Message'
    if isinstance(event, TaskArtifactUpdateEvent):
        text = ''.join(part.text for part in event.artifact.parts)
        return f'{"chunk" if event.artifact.artifact_id == CHUNKS else "art"} {text}'
    state = TaskState.Name(event.status.state).removeprefix('TASK_STATE_')
    return f'Task({state})' if isinstance(event, Task) else state


class _Named(User):
    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def is_authenticated(self) -> bool:
        return True

    @property
    def user_name(self) -> str:
        return self._name


def caller(name: str = 'user') -> ServerCallContext:
    """The call context of a named user."""
    return ServerCallContext(user=_Named(name))


def user_message(text: str, task: Task | None = None) -> Message:
    """A message that begins a task, or a turn of one."""
    return Message(
        role=Role.ROLE_USER,
        message_id=uuid.uuid4().hex,
        task_id=task.id if task else '',
        context_id=task.context_id if task else '',
        parts=[Part(text=text)],
    )


def send_request(text: str, task: Task | None = None) -> SendMessageRequest:
    """The request that sends such a message."""
    return SendMessageRequest(message=user_message(text, task))


def new_task(context: RequestContext) -> Task:
    """The task that an agent makes of a first message."""
    return Task(
        id=context.task_id,
        context_id=context.context_id,
        status=TaskStatus(state=TaskState.TASK_STATE_SUBMITTED),
        history=[context.message] if context.message else [],
    )


def status_update(
    context: RequestContext, state: TaskState, text: str = ''
) -> TaskStatusUpdateEvent:
    """An agent's word on the state of its task, with a message if there is a text."""
    message = Message(role=Role.ROLE_AGENT, message_id=uuid.uuid4().hex, parts=[Part(text=text)])
    status = TaskStatus(state=state, message=message if text else None)
    status.timestamp.GetCurrentTime()
    return TaskStatusUpdateEvent(
        task_id=context.task_id, context_id=context.context_id, status=status
    )


def artifact_update(
    context: RequestContext, artifact_id: str, text: str, *, append: bool = False
) -> TaskArtifactUpdateEvent:
    """A part of an agent's answer."""
    return TaskArtifactUpdateEvent(
        task_id=context.task_id,
        context_id=context.context_id,
        artifact=Artifact(artifact_id=artifact_id, parts=[Part(text=text)]),
        append=append,
    )


def agent_card(url: str) -> AgentCard:
    """The card of the scripted agent."""
    return AgentCard(
        name='Scripted agent',
        description='Does what its user says, word by word',
        version='1',
        supported_interfaces=[
            AgentInterface(url=url, protocol_binding='JSONRPC', protocol_version='1.0')
        ],
        default_input_modes=['text/plain'],
        default_output_modes=['text/plain'],
        skills=[AgentSkill(id='script', name='Script', description='Words', tags=['test'])],
        capabilities=AgentCapabilities(streaming=True, push_notifications=True),
    )
