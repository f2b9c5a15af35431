"""A store over time: each commit to a follower, metrics that come later, past saves, and what is dropped of old ones.

It may know jobs, checkpoints and states. `CheckpointStore.follow`, `annotate`, `history`, `thin` and `retain` use it.
"""
