"""One service in four frameworks, run as real server processes: every one behaves as its request asks it to."""
