"""Names that more than one process of a server must agree on."""

BACKEND = "knowledge-tree"
"""Value of `--radix-cache-backend` that selects us."""

STATE_KEY = "rag_radix"
"""Key of the tree's report in the scheduler's internal state."""

PROMOTE_ACTION = "promote"
"""What a scheduler does with the ids of speculations that were right: `promote`."""

POOL_ACTION = "pool"
"""Asks a scheduler whether it would admit a speculation."""

ORDER_ACTION = "order"
"""Asks a scheduler in which order of some documents it has most of a prompt cached."""
