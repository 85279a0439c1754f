"""A cluster in one process, agents that follow a script, and the faults of the SDK.

The command line and the test suite play the same scenes here, so that each fault
is written once.
"""

from cluster_subscribe._testing.agent import Gates, ScriptedAgent
from cluster_subscribe._testing.cluster import Cluster, Decorate, Replica, Watch, label
from cluster_subscribe._testing.faults import FAULTS, Fault, Outcome
from cluster_subscribe._testing.parts import Parts

__all__ = [
    'FAULTS',
    'Cluster',
    'Decorate',
    'Fault',
    'Gates',
    'Outcome',
    'Parts',
    'Replica',
    'ScriptedAgent',
    'Watch',
    'label',
]
