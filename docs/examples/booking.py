"""The agent of the examples: it books a table, and asks once for how many people."""

import asyncio
import os

from a2a.helpers import new_task_from_user_message
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.tasks import TaskUpdater
from a2a.types import AgentCapabilities, AgentCard, AgentInterface, AgentSkill, Part

SECONDS = float(os.environ.get('BOOKING_SECONDS', '10'))
"""How long it takes to ask the restaurant: long enough to subscribe meanwhile, by hand."""


class BookingAgent(AgentExecutor):
    """Asks for the number of people unless it was told, then books."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Runs one turn."""
        task = context.current_task
        if task is None:
            assert context.message is not None, 'a turn begins with a message'
            task = new_task_from_user_message(context.message)
            await event_queue.enqueue_event(task)
        updater = TaskUpdater(event_queue, task.id, task.context_id)
        people = ''.join(filter(str.isdigit, context.get_user_input()))
        if not people:
            question = updater.new_agent_message([Part(text='For how many people?')])
            await updater.requires_input(question)
            return
        await updater.start_work()
        await asyncio.sleep(SECONDS)
        await updater.add_artifact([Part(text=f'A table for {people}')], name='booking')
        await updater.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Gives up the booking."""
        task = context.current_task
        assert task is not None, 'the SDK cancels tasks, not messages'
        await TaskUpdater(event_queue, task.id, task.context_id).cancel()


def card(url: str, *bindings: str) -> AgentCard:
    """The agent's card.

    Args:
        url: The address that clients use. In a cluster that is the load balancer's.
        bindings: The protocol bindings served there.
    """
    return AgentCard(
        name='Booking',
        description='Books a table.',
        version='1.0.0',
        capabilities=AgentCapabilities(streaming=True),
        default_input_modes=['text/plain'],
        default_output_modes=['text/plain'],
        skills=[
            AgentSkill(id='book', name='Book a table', description='Asks and books.', tags=['book'])
        ],
        supported_interfaces=[
            AgentInterface(url=url, protocol_binding=binding, protocol_version='1.0')
            for binding in bindings
        ],
    )
