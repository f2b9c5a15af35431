from ckptstore.interchange.exporting import export as export
from ckptstore.interchange.importing import import_state as import_state
from ckptstore.interchange.merging.story import merge as merge
