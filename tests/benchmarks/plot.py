"""The agent beside idle subscribers, drawn."""

from pathlib import Path
from statistics import median

from tests.benchmarks.measure import Figure


def draw(figures: list[Figure], path: Path) -> None:
    """Draws how fast an agent gets its events out, without and with idle subscribers."""
    import matplotlib as mpl

    mpl.use('svg')
    from matplotlib import pyplot as plt

    rates = [figure for figure in figures if 'beside' in figure.name and 'rate' in figure.name]
    chart, axes = plt.subplots(figsize=(7, 2.6))
    for place, figure in enumerate(rates):
        for offset, (name, values, colour) in enumerate(
            (('stock a2a-sdk', figure.stock, '#b0b0b0'), ('wrapped', figure.ours, '#2a7f62'))
        ):
            axes.barh(
                place + 0.35 * offset,
                median(values),
                height=0.32,
                color=colour,
                label=name if not place else None,
            )
            axes.text(median(values), place + 0.35 * offset, f' {median(values):.3g}', va='center')
    axes.set_yticks([place + 0.17 for place in range(len(rates))])
    axes.set_yticklabels([figure.name.split(',')[0].removeprefix('agent ') for figure in rates])
    axes.set_xlabel('events a second that an agent at 20 a second gets out')
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(frameon=False, ncols=2, loc='lower center', bbox_to_anchor=(0.5, 1))
    chart.tight_layout()
    chart.savefig(path, metadata={'Date': None})
