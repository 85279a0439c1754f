"""README and docs: their Python runs, and what they list is there."""

import ast
import inspect
import logging
import re
import textwrap

from collections.abc import Iterator
from pathlib import Path

import pytest

from a2a.server.models import TaskEventModel
from opentelemetry import metrics
from sqlalchemy import inspect as inspect_database
from sqlalchemy.dialects import registry
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sybil import Sybil
from sybil.example import Example
from sybil.parsers.markdown import CodeBlockParser

import cluster_subscribe

from cluster_subscribe import ClusterSubscribeHandler, Settings, SharedTailEventStream
from cluster_subscribe._testing import FAULTS, ScriptedAgent
from cluster_subscribe._testing.messages import agent_card
from cluster_subscribe.event_log.schema import index_statement
from cluster_subscribe.telemetry import METRICS

ROOT = Path(__file__).parent.parent
README = ROOT / 'README.md'
DOCS = ROOT / 'docs'
EXAMPLES = DOCS / 'examples'
DOCUMENTS = [README, ROOT / 'SECURITY.md', *sorted(DOCS.glob('*.md'))]


def each(documents: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        'document', documents, ids=lambda path: str(path.relative_to(ROOT))
    )


# The Python of the documents.


def evaluate(example: Example) -> None:
    """Runs a block; what awaits at top level is left in the namespace as a coroutine."""
    source = '\n' * (example.line + example.parsed.line_offset) + example.parsed
    code = compile(
        source, example.path, 'exec', flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
    )
    example.namespace['_running'] = eval(code, example.namespace)  # noqa: S307 - our own docs


def quotes(document: Path) -> list[tuple[str, str]]:
    """The blocks that quote a file of the examples, with the file's name."""
    quote = r'<!-- quote: (\S+) -->\n```python\n(.*?)```\n'
    return re.findall(quote, document.read_text(), re.DOTALL)


async def tables_of(engine: AsyncEngine) -> set[str]:
    async with engine.connect() as connection:
        return set(await connection.run_sync(lambda sync: inspect_database(sync).get_table_names()))


def test_the_readme_can_be_read_at_a_sitting() -> None:
    assert len(README.read_text().split()) < 700


@pytest.fixture
def _for_one_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keeps from later tests what a document sets for its whole process."""
    monkeypatch.setattr(metrics, 'set_meter_provider', lambda _: None)
    logger = logging.getLogger('cluster_subscribe')
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.usefixtures('_for_one_test')
# The SDK's own, for a table of another name.
@pytest.mark.filterwarnings('ignore:This declarative base already contains')
@each([document for document in DOCUMENTS if '```python' in document.read_text()])
async def test_the_python_of_a_document_runs(
    document: Path, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parsed = Sybil([CodeBlockParser('python', evaluate)]).parse(document)
    # What a reader has.
    parsed.namespace.update(
        card=agent_card('http://127.0.0.1'),
        database_url=sqlite_url,
        executor=ScriptedAgent(),
    )
    quoted = {textwrap.dedent(code) for _, code in quotes(document)}
    for example in parsed.examples():
        if example.parsed not in quoted:
            example.evaluate()
            if inspect.iscoroutine(running := parsed.namespace.pop('_running')):
                await running
    if document == README:
        assert isinstance(parsed.namespace['handler'], ClusterSubscribeHandler)
        async with parsed.namespace['lifespan'](None):
            tables = await tables_of(parsed.namespace['engine'])
        assert {'tasks', 'task_events', 'task_versions'} <= tables


@each([document for document in DOCUMENTS if quotes(document)])
def test_what_a_document_quotes_stands_in_the_example(document: Path) -> None:
    for file, code in quotes(document):
        assert code in (document.parent / file).read_text(), file


# What the documents list.


def rows(document: Path, first: str) -> list[list[str]]:
    """The cells of the table rows whose first cell matches."""
    found = []
    for line in document.read_text().splitlines():
        if line.startswith('|'):
            cells = [cell.strip() for cell in line.strip('|').split('|')]
            if re.fullmatch(first, cells[0]):
                found.append(cells)
    return found


def slug(heading: str) -> str:
    return re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')


@each(DOCUMENTS)
def test_every_link_leads_somewhere(document: Path) -> None:
    text = re.sub(r'```.*?```', '', document.read_text(), flags=re.DOTALL)
    for target in re.findall(r'\]\(([^)\s]+)\)', text):
        if target.startswith('https://'):
            continue
        file, _, anchor = target.partition('#')
        there = (document.parent / file).resolve() if file else document
        assert there.exists(), target
        if anchor:
            headings = re.findall(r'^#+ (.*)$', there.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), target


def test_every_setting_is_listed_with_its_values_and_its_default() -> None:
    listed = {
        cells[0].strip('`'): (cells[1], cells[2].strip('`'))
        for cells in rows(DOCS / 'operations.md', '`CLUSTER_SUBSCRIBE[A-Z_]*`')
    }
    expected = {}
    for name, field in Settings.model_fields.items():
        variable = 'CLUSTER_SUBSCRIBE' if name == 'mode' else f'CLUSTER_SUBSCRIBE_{name.upper()}'
        default = getattr(field.default, 'value', field.default)
        values = {float: 'seconds > 0', int: 'integer >= 1'}.get(
            type(field.default),
            ', '.join(f'`{one.value}`' for one in type(field.default))
            if hasattr(type(field.default), '__members__')
            else None,
        )
        expected[variable] = (
            values,
            f'{default:g}' if isinstance(default, float) else f'{default}',
        )
    assert listed == expected


def test_every_metric_is_listed_with_its_kind_and_unit() -> None:
    listed = {
        cells[0].strip('`'): tuple(cells[1:])
        for cells in rows(DOCS / 'operations.md', r'`cluster_subscribe\.[a-z.]+`')
    }
    assert listed.keys() == {f'cluster_subscribe.{name}' for name in METRICS}
    for name, (kind, unit, meaning) in METRICS.items():
        told = listed[f'cluster_subscribe.{name}']
        assert (told[0], told[1].strip('`')) == (kind, unit)
        assert told[2].startswith(meaning)


def test_every_fault_is_listed_by_number_and_title() -> None:
    listed = {cells[0]: cells[1] for cells in rows(DOCS / 'faults.md', r'F\d+')}
    assert {fault.number: fault.title for fault in FAULTS}.items() <= listed.items()


def logged() -> set[str]:
    """The words of every log line of the package, `…` for what varies."""
    found = set()
    package = Path(cluster_subscribe.__file__).parent
    for path in package.rglob('*.py'):
        if 'cli' in path.relative_to(package).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr == 'log':
                node.args.pop(0)
            is_log = (isinstance(called, ast.Name) and called.id == 'log') or (
                isinstance(called, ast.Attribute)
                and isinstance(called.value, ast.Name)
                and called.value.id == 'logger'
                and called.attr != 'isEnabledFor'
            )
            words = node.args[0]
            if is_log and isinstance(words, ast.Constant):
                found.add(re.sub(r'%[sd]', '…', str(words.value)))
    return found


def test_every_log_line_is_explained_and_no_other() -> None:
    text = (DOCS / 'operations.md').read_text()
    section = text.partition('## Log lines')[2].partition('\n## ')[0]
    explained = set(re.findall(r'^\| `(.*?)` \|', section, re.MULTILINE))
    assert logged() == explained


@pytest.mark.parametrize('dialect', ['postgresql', 'mysql', 'sqlite'])
def test_the_index_statements_are_those_that_the_reader_names(
    sqlite_url: str, dialect: str
) -> None:
    # Building a stream gives the SDK's table the index.
    SharedTailEventStream(create_async_engine(sqlite_url))
    [index] = [
        index
        for index in TaskEventModel.metadata.tables['task_events'].indexes
        if len(index.columns) > 1
    ]
    assert (
        f'{index_statement(index, registry.load(dialect)(), None)};'
        in (DOCS / 'operations.md').read_text()
    )


def test_every_public_name_is_in_the_documents() -> None:
    text = '\n'.join(document.read_text() for document in DOCUMENTS)
    assert not [name for name in cluster_subscribe.__all__ if f'`{name}' not in text]


def test_the_api_reference_has_every_public_name_once() -> None:
    text = (DOCS / 'api.md').read_text()
    listed = re.findall(r'^::: cluster_subscribe\.(\w+)$', text, re.MULTILINE)
    assert sorted(listed) == sorted(cluster_subscribe.__all__)


def test_the_site_has_every_document() -> None:
    text = (ROOT / 'mkdocs.yml').read_text()
    assert sorted(re.findall(r'- (\S+\.md)$', text, re.MULTILINE)) == sorted(
        document.name for document in DOCS.glob('*.md')
    )


def test_every_module_is_in_the_table_of_modules() -> None:
    package = Path(cluster_subscribe.__file__).parent
    listed = {
        cells[0].strip('`') for cells in rows(DOCS / 'how-it-works.md', r'`[a-z_/]+(\.py|/)`')
    }
    assert {name for name in listed if not (package / name).exists()} == set()
    modules = {
        path.name if path.suffix else f'{path.name}/'
        for path in package.iterdir()
        if not path.name.startswith('__') and (path.suffix == '.py' or path.is_dir())
    }
    assert modules <= listed
