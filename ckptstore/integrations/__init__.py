"""Integrations of ckptstore with training frameworks, each a package of its own that is loaded on first use."""
