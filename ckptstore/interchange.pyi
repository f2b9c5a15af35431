from ckptstore.extensions.exchange.exporting import export as export
from ckptstore.extensions.exchange.importing import import_state as import_state
from ckptstore.extensions.exchange.merging.story import merge as merge
