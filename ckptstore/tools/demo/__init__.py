"""Demonstrate a real training run that is killed in the middle of an upload, and resumes with the same losses."""
