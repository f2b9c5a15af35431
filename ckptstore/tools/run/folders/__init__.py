"""Folders that trainers write checkpoints to: which are in them, which are finished, and how one comes back.

It may know checkpoints and stores as their users do. It gives the agent and the command line what they work with.
"""

from ckptstore.tools.run.folders.candidate import Prospect as Prospect
from ckptstore.tools.run.folders.candidate import Rules as Rules
from ckptstore.tools.run.folders.folder import Folder as Folder
from ckptstore.tools.run.folders.folder import Held as Held
from ckptstore.tools.run.folders.folder import Look as Look
from ckptstore.tools.run.folders.folder import candidates_of as candidates_of
from ckptstore.tools.run.folders.found import Found as Found
from ckptstore.tools.run.folders.found import Home as Home
from ckptstore.tools.run.folders.found import folder_of as folder_of
from ckptstore.tools.run.folders.found import home_of as home_of
from ckptstore.tools.run.folders.job_seen import JobSeen as JobSeen
from ckptstore.tools.run.folders.job_seen import StartedJob as StartedJob
from ckptstore.tools.run.folders.saving import save_found as save_found
from ckptstore.tools.run.folders.shape import read_shapes as read_shapes
from ckptstore.tools.run.folders.way_back import RestoreReport as RestoreReport
from ckptstore.tools.run.folders.way_back import newest_first as newest_first
from ckptstore.tools.run.folders.way_back import restore_folder as restore_folder
from ckptstore.tools.run.folders.way_back import same as same
from ckptstore.tools.run.folders.way_back import set_aside_unfinished as set_aside_unfinished
from ckptstore.tools.run.folders.way_back import whole_in as whole_in
