"""Export in the layout of Hugging Face: safetensors files, their index, and the config of the model beside them.

`safetensors_layout` deals the tensors to files, `source` makes the bytes of a file, `progress` marks finished files at
the target, and `writing` is the story.
"""
