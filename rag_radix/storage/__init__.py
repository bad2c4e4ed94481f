"""KV that outlives the server: verified files below the host tier, and what is known of them."""
