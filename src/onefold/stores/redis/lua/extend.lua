-- Renew the lease and the TTL of a running record; of a held one keep only the notes.
-- ARGV: token; lease; ttl; then the notes with their length, if there are new ones.
-- 1: it is ours. 0: it is not.
local found = redis.call('GET', KEYS[1])
if not is_owned(found, ARGV[1]) then
  return 0
end
local parts = taken_apart(found)
if parts.state ~= RUNNING and parts.state ~= HELD then
  return 0
end
parts.revision = parts.revision + 1
if ARGV[4] then
  local notes, result, remark = notes_result_and_remark(parts.contents)
  -- A log only grows: a shorter one is older, and has come late.
  if #ARGV[4] >= #notes then
    parts.contents = contents_of(ARGV[4], result, remark)
  end
end
if parts.state == HELD then
  -- A late heartbeat must not give an end to what waits for a person.
  redis.call('SET', KEYS[1], put_together(parts), 'KEEPTTL')
  return 1
end
parts.lease = moment(now() + ARGV[2])
return write(put_together(parts), ARGV[3])
