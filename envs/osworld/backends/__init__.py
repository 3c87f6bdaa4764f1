"""Where machines come from. One file per kind."""
