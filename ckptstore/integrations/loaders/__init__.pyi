from ckptstore.integrations.loaders.map_loader import MapLoader as MapLoader
from ckptstore.integrations.loaders.stream_loader import StreamLoader as StreamLoader
