"""HTTP out: connections to engines, pools, the prober."""
