-- Forget a record, or leave it open.
-- ARGV: token; then, to leave it open: ttl; attempt; notes with their length; remark.
-- 1: it was ours, or is not there. 0: it is another's.
local found = redis.call('GET', KEYS[1])
if not found then
  return 1
end
if not is_owned(found, ARGV[1]) then
  return 0
end
if not ARGV[2] then
  redis.call('DEL', KEYS[1])
  wake()
  return 1
end
local parts = taken_apart(found)
local _, result = notes_result_and_remark(parts.contents)
parts.revision = parts.revision + 1
parts.state = OPEN
parts.attempt = tonumber(ARGV[3])
parts.lease = ''
parts.contents = contents_of(ARGV[4], result, ARGV[5])
write(put_together(parts), ARGV[2])
wake()
return 1
