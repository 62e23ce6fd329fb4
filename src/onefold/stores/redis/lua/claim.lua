-- Write a record if the address is free, or if its record is still exactly what its finder saw.
-- ARGV: token and form; age; lease (empty: none); ttl; counts, fingerprint and contents; then what it shall replace,
-- if it replaces something: the token and the revision that were seen.
-- 1: written, now or before. 0: what it wanted to replace is gone. Else the record in the way.
local token, seen = string.sub(ARGV[1], 1, 16), ARGV[6]
local found = redis.call('GET', KEYS[1])
if found then
  -- Marking a record held borrows its owner's token, which therefore proves nothing.
  if is_owned(found, token) and seen ~= token then
    return 1
  end
  if not is_owned(found, seen) then
    return shown(found)
  end
  local _, revision = counts(found)
  if revision ~= tonumber(ARGV[7]) then
    return shown(found)
  end
elseif seen then
  return 0
end
local time = now()
local lease = ARGV[3] ~= '' and moment(time + ARGV[3]) or ''
write(ARGV[1] .. moment(math.max(time - ARGV[2], 0)) .. lease .. ARGV[5], ARGV[4])
-- Held, skipped, or as a bypass found it: somebody may wait for the end of what was replaced.
if found and lease == '' then
  wake()
end
return 1
