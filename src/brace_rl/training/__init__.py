"""The asynchronous PPO trainer: types, engine, staleness, learner, backends, loop."""
