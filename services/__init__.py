"""Private servers for the tests: started on free ports of the loopback, with their data under `.services/`.

`python -m services up [names]` starts some that stay; `status` lists them, `down` ends them, `install` fetches the
Debian packages. The tests ask for theirs through the fixtures of `services.fixtures`, which start a server when the
first test needs it and end it with the session. Nothing here is part of the library: the library never imports it.
"""
