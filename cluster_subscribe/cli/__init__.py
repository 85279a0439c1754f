"""The command line: `cluster-subscribe`."""

from cluster_subscribe.cli.main import main, program

__all__ = ['main', 'program']
