-- End a record.
-- ARGV: token; ttl; state; 8 if the result is omitted, else 0; contents.
-- 1: it is ours. 0: it is not.
local found = redis.call('GET', KEYS[1])
if not is_owned(found, ARGV[1]) then
  return 0
end
local parts = taken_apart(found)
parts.revision = parts.revision + 1
parts.state = tonumber(ARGV[3])
parts.omitted = tonumber(ARGV[4])
parts.lease = ''
parts.contents = ARGV[5]
write(put_together(parts), ARGV[2])
wake()
return 1
