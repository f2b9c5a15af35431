from ckptstore.integrations.dcp.store_reader import StoreReader as StoreReader
from ckptstore.integrations.dcp.store_reader import translated as translated
from ckptstore.integrations.dcp.store_writer import StoreWriter as StoreWriter
