"""`python -m cluster_subscribe` is the command `cluster-subscribe`."""

from cluster_subscribe.cli import program

if __name__ == '__main__':
    program()
