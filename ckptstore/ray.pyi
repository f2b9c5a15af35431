from ckptstore.integrations.ray import *  # noqa: F403
