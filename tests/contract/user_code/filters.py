"""Dynamic filters in both forms."""

from miles.rollout.filter_hub.base_types import DynamicFilterOutput


def not_every_fourth(args, group, **kwargs):
    return group[0].group_index % 4 != 0


def not_every_third(args, group, **kwargs):
    if group[0].group_index % 3 == 0:
        return DynamicFilterOutput(keep=False, reason="third")
    return DynamicFilterOutput(keep=True)
