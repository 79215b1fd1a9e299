"""Rollouts without Ray: domains, routing, retries, rewards, batches. Plain asyncio; the event loop's clock is the only clock."""
