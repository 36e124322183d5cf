"""The trainer's side: FSDP2 model, optimizer step, checkpoints, and the loop of a train worker."""
