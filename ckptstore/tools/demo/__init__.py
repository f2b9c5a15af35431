"""The demo: a real training run that is killed in the middle of an upload, and goes on as if nothing had happened."""
