-- The record, or nothing.
local found = redis.call('GET', KEYS[1])
return found and shown(found)
