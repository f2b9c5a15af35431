"""Publish weights to a place from which rollout and serving nodes pull them, as full versions and as deltas.

It may know stores, saves, states and the formats of other tools. Users get `open_publication` and `Subscription` from
it.
"""
