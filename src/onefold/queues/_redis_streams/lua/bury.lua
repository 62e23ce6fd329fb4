-- Write a dead letter and settle its entry, both or neither. Whoever does not hear the answer may ask again: what is
-- settled, or another consumer's, is not buried.
-- KEYS: stream, dead letters. ARGV: group, consumer, id, fields of the dead letter.
-- Returns 1 if it was written.
local stream, group, consumer, id = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
-- An error is an answer: without its group, or its stream, nobody else has it.
local pending = redis.pcall('XPENDING', stream, group, id, id, 1)[1]
if pending and pending[2] ~= consumer then
  return 0
end
-- Not pending, but in the stream: it is settled. In neither: it was deleted meanwhile, and this is all that is left.
if not pending and #redis.call('XRANGE', stream, id, id) > 0 then
  return 0
end
redis.call('XADD', KEYS[2], '*', unpack(ARGV, 4))
redis.call('XACK', stream, group, id)
return 1
