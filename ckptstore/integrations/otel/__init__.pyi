from ckptstore.integrations.otel.telemetry import Telemetry as Telemetry
from ckptstore.integrations.otel.telemetry import instrument as instrument
