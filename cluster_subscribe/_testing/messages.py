"""Callers, messages, cards and labels: what a scene says and hears, in a line each."""

import uuid

from a2a.auth.user import User
from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    Message,
    Part,
    Role,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
)

from cluster_subscribe._testing.agent import CHUNKS


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
