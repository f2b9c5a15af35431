"""Watching a store from outside: what is in flight, how fast, and what was committed. Nothing is ever written."""
