"""What a run will take, before it: operations, memory, models without weights."""
