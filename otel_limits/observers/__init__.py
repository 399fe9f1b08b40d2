"""Who is told what happened: each module is one observer, and none knows another."""
