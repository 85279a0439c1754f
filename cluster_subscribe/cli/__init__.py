"""The command line: `cluster-subscribe`."""

from cluster_subscribe.cli.main import main

__all__ = ['main']
