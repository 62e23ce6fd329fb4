-- Change the notes of a record that is still exactly what its finder saw, and nothing else.
-- ARGV: the token and the revision that were seen; the notes with their length.
-- 1: written, now or before. 0: it is gone. Else the record in the way.
local found = redis.call('GET', KEYS[1])
if not found then
  return 0
end
if not is_owned(found, ARGV[1]) then
  return shown(found)
end
local parts = taken_apart(found)
local notes, result, remark = notes_result_and_remark(parts.contents)
local seen = tonumber(ARGV[2])
if parts.revision == seen + 1 and notes == ARGV[3] then
  return 1
end
if parts.revision ~= seen then
  return shown(found)
end
parts.revision = parts.revision + 1
parts.contents = contents_of(ARGV[3], result, remark)
redis.call('SET', KEYS[1], put_together(parts), 'KEEPTTL')
return 1
