"""A page that answers while one moves a slider: closed forms in JavaScript, campaigns computed beforehand, runs."""
