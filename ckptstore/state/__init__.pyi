from ckptstore.state.live.flatten import per_rank as per_rank
from ckptstore.state.live.flatten import replicated as replicated
