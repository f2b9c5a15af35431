"""A deterministic simulation of jobs that save to one store while everything goes wrong that can."""

from __future__ import annotations
