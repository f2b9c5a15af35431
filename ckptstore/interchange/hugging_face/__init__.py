"""Exports in the layout of Hugging Face: safetensors files, their index, and the config of the model beside them.

`safetensors_layout` says which tensor goes into which file, `source` makes the bytes of a file, `progress` keeps at the
target what is done, and `writing` is the story.
"""
