"""`python -m cluster_subscribe` is the command `cluster-subscribe`."""

import sys

from cluster_subscribe.cli import main

if __name__ == '__main__':
    sys.exit(main())
