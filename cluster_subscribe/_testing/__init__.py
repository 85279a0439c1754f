"""A cluster in one process, agents that follow a script, and the faults of the SDK.

The commands and the test suite play the same scenes, so that each fault is written once. No
public API: names here change without notice.
"""

from cluster_subscribe._testing.agent import Gates, ScriptedAgent
from cluster_subscribe._testing.cluster import Cluster, Decorate, Replica
from cluster_subscribe._testing.fault import Fault, Outcome
from cluster_subscribe._testing.faults import FAULTS
from cluster_subscribe._testing.messages import label
from cluster_subscribe._testing.parts import Parts
from cluster_subscribe._testing.watching import Watch

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
