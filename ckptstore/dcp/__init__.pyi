from ckptstore.dcp.store_reader import StoreReader as StoreReader
from ckptstore.dcp.store_reader import translated as translated
from ckptstore.dcp.store_writer import StoreWriter as StoreWriter
