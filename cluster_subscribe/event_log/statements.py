"""The statements that read the SDK's `task_events`, `task_versions` and `tasks` tables.

Each is a function of the tables, without a connection. `queries` runs them.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    CompoundSelect,
    Integer,
    ScalarSelect,
    Select,
    String,
    Table,
    and_,
    any_,
    bindparam,
    case,
    func,
    literal,
    or_,
    select,
    union_all,
)
from sqlalchemy.dialects import postgresql


def stored_versions(versions: Table, dialect: str) -> Select[Any]:
    """The owner and version of each task in `ids` that is stored."""
    v = versions.c
    return select(v.task_id, v.owner, v.version).where(_among(v.task_id, dialect))


def stored_states(tasks: Table, versions: Table, dialect: str) -> Select[Any]:
    """The state and version of each task in `ids` that has a row, versioned or not."""
    t, v = tasks.c, versions.c
    return (
        select(t.id, t.status['state'].as_string(), v.version)
        .select_from(tasks.outerjoin(versions, v.task_id == t.id))
        .where(_among(t.id, dialect))
    )


def end_of_earlier_incarnation(events: Table, versions: Table) -> Select[Any]:
    """The highest `seq` in the log of `task_id` whose version is above the stored one.

    Log and store are compared in one statement: between two, an event of the current
    incarnation could be committed.
    """
    e = events.c
    return select(func.max(e.seq)).where(
        e.task_id == bindparam('task_id'),
        e.task_version > func.coalesce(_stored_version(versions), 0),
    )


def incarnations(events: Table, versions: Table) -> Select[Any]:
    """What the log of `task_id` says of incarnations.

    The number of rows of version 1 and the highest `seq` among them, the highest version,
    whether the row (`version`, `seq`) is there, and the stored version.
    """
    e = events.c
    first = e.task_version == 1
    own = and_(e.task_version == bindparam('version'), e.seq == bindparam('seq'))
    return select(
        func.count(case((first, 1))),
        func.max(case((first, e.seq))),
        func.max(e.task_version),
        func.count(case((own, 1))),
        _stored_version(versions),
    ).where(e.task_id == bindparam('task_id'))


def _stored_version(versions: Table) -> ScalarSelect[Any]:
    v = versions.c
    return select(v.version).where(v.task_id == bindparam('task_id')).scalar_subquery()


def large_events(events: Table) -> Select[Any]:
    """The events of the rows with the `seq`s in `large`, which a page left out."""
    e = events.c
    return select(e.seq, e.event_data).where(e.seq.in_(bindparam('large', expanding=True)))


def pages(
    events: Table, versions: Table, dialect: str, count: int
) -> CompoundSelect[Any] | Select[Any]:
    """At most `limit` rows after each of `count` cursors, each with its page's number.

    One seek in the index for each page, whatever lies before its cursor. Events of more
    than `inline` bytes are left out.
    """
    if count == 1:
        return _page(events, versions, dialect, 0)
    each = [select(_page(events, versions, dialect, number).subquery()) for number in range(count)]
    return union_all(*each).order_by('page', 'task_version', 'seq')


def _page(events: Table, versions: Table, dialect: str, number: int) -> Select[Any]:
    """The rows after the cursor (`version_N`, `seq_N`) of `task_N`, above `min_seq_N`."""
    c, v = events.c, versions.c
    task_id = bindparam(f'task_{number}', type_=String)
    version = bindparam(f'version_{number}', type_=BigInteger)
    stored = select(v.version).where(v.task_id == task_id).scalar_subquery()
    octets = func.length if dialect == 'sqlite' else func.octet_length
    size = octets(c.event_data)
    return (
        select(
            literal(number, literal_execute=True).label('page'),
            c.task_id,
            c.task_version,
            c.seq,
            c.owner,
            case((size <= bindparam('inline', type_=Integer), c.event_data)).label('event_data'),
            size.label('size'),
            stored.label('stored'),
        )
        .where(
            c.task_id == task_id,
            c.seq > bindparam(f'min_seq_{number}', type_=BigInteger),
            c.seq >= _incarnation_start(events, task_id),
            *_after(events, version, bindparam(f'seq_{number}', type_=BigInteger)),
        )
        .order_by(c.task_version, c.seq)
        .limit(bindparam('limit', type_=Integer))
    )


def _incarnation_start(events: Table, task_id: ColumnElement[str]) -> ScalarSelect[Any]:
    """Where the rows of a task begin: a recreated one has two of version 1."""
    first = events.alias('first').c
    return (
        select(case((func.min(first.seq) < func.max(first.seq), func.max(first.seq)), else_=0))
        .where(first.task_id == task_id, first.task_version == 1)
        .scalar_subquery()
    )


def _after(
    events: Table, version: ColumnElement[int], seq: ColumnElement[int]
) -> tuple[ColumnElement[bool], ...]:
    """What lies behind a cursor: the index seeks the first term, the second leaves out the rest."""
    c = events.c
    return c.task_version >= version, or_(c.task_version > version, c.seq > seq)


def _among(task_id: ColumnElement[str], dialect: str) -> ColumnElement[bool]:
    """Membership in the parameter `ids`, one parameter where the database can."""
    if dialect == 'postgresql':
        return task_id == any_(bindparam('ids', type_=postgresql.ARRAY(String)))
    if dialect == 'sqlite':
        return task_id.in_(select(func.json_each(bindparam('ids')).table_valued('value').c.value))
    return task_id.in_(bindparam('ids', expanding=True))
