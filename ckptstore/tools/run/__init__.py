"""The agent: a process beside a trainer that writes checkpoints to a folder. It commits each finished one to a store.

`story` is what happens from the restore to the exit code, `committer` the loop on a thread of its own, `trainer` the
process, `guard` what ends it when the agent is killed. What a folder holds, and what of it is finished, is known by
`ckptstore.tools.run.folders`; how a checkpoint is saved, by the store. The training knows nothing of the agent: its
output, input and environment are its own, and no failure of the agent ends it.
"""
