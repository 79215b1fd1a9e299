"""Terms of a reward, and how they are added to it."""
