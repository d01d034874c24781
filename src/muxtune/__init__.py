"""MuxTune: many PEFT tasks on one frozen backbone."""
