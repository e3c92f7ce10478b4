"""`reef demo`: the main job, end to end, on a small real model."""
