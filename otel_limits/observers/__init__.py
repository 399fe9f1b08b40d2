"""Who is told what happened: none knows another. `OBSERVERS` in `runtime/wiring.py` lists them."""
