"""The front door: everything comes from `cluster_subscribe`, and nothing else does."""

import cluster_subscribe


def test_all_names_exactly_what_the_package_exports() -> None:
    modules = {
        name for name, value in vars(cluster_subscribe).items() if type(value).__name__ == 'module'
    }
    exported = {name for name in vars(cluster_subscribe) if not name.startswith('_')} - modules
    assert sorted(cluster_subscribe.__all__) == sorted(exported)


def test_every_public_name_is_documented() -> None:
    for name in cluster_subscribe.__all__:
        assert getattr(cluster_subscribe, name).__doc__, name
