"""Reading a dataset back from its store: records, plan, index and shards, all checked."""
